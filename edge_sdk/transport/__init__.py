"""How messages travel: the in-memory link; MQTT comes beside it."""
