"""How messages travel: links over MQTT, and a queue inside one process."""
