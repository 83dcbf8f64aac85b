"""Fast classes of hand-written modules of known texts (``forms.py``) and of classes that a user registers
(``register.py``), and the trial of both (``check.py``)."""
