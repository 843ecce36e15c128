"""An ordinary torch module becomes a plain graph: how it is called, exported and simplified."""
