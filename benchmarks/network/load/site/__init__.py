"""The site of a load test: broker, coordinator, many devices."""
