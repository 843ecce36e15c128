"""The link over MQTT."""
