"""The command line `mirage-hf`: it calls the public API and shows results."""
