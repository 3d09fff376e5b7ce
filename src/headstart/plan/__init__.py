"""What a deployment would do: hardware sheets, cost models, and whole clusters in virtual time."""
