"""Who may ask: tokens, sessions, and checks on every request."""
