"""Which modules have a fast class: hand-written modules of known texts (``forms.py``), and classes that a user registers
(``register.py``); and the trial of both (``check.py``, ``check_form.py``)."""
