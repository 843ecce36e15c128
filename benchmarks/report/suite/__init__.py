"""All performance figures in one go, and what became slower between two sets of them."""
