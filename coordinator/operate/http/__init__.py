"""The operator's page, its API and metrics, over HTTP."""
