"""The embedded broker: Mosquitto where it is installed, else amqtt."""
