"""Tunes the retriever by what helps the reader: its likelihood of the answer over each chunk's stored KV (REALM).

Questions come from ``questions.py`` or ``generate.py``, scores from ``teacher.py``; ``training.py`` fits one of ``students.py``
to them by ``losses.py``, ``judging.py`` compares before and after, ``saving.py`` writes; ``tune.py`` holds it together.
"""
