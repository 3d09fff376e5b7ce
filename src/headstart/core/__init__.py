"""Records, messages and contracts shared by every package. Imports nothing else of Headstart's and never torch."""
