"""Links to a broker, uploads with receipts, and a probe that tries a broker out."""
