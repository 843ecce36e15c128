"""Other systems beside ours: their simulators, and a job deployed on Flower."""
