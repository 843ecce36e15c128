"""Links that carry messages: over MQTT and in memory."""
