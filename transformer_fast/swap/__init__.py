"""``register``: what a user says about a class of modules, checked once."""

from .register import Registration, register

__all__ = ["Registration", "register"]
