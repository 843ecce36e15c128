"""What survives crashes, what that costs, and how soon a run is back."""
