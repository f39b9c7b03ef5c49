"""Training of Kozue's own models: a hybrid target, a DFlash drafter and a Weaver."""

__version__ = "0.1.0"
