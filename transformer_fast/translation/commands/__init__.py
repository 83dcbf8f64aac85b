"""The commands of the command line that train, translate and exchange models."""
