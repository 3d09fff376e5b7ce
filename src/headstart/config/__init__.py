"""Settings: frozen, documented dataclasses, and `resolve`, which turns every "auto" into a value once."""
