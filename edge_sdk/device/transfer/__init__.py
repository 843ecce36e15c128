"""Moving bytes: chunks pulled from the broker, movements uploaded to the coordinator."""
