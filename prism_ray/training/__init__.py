"""Tasks, objectives, the loop and its back ends."""
