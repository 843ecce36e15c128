"""Operating a coordinator: settings, broker, identities, `serve`."""
