"""One trial: a fresh process trains one case and is measured."""
