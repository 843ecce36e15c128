"""Links that carry messages over MQTT, and their parts."""
