"""Device profiles: one TOML per phone or board."""
