"""Tunes the retriever to find chunks that help the reader, by its answer likelihood over a chunk's stored KV (REALM).

Questions come from ``questions.py``, scores from ``teacher.py``. ``training.py`` fits one of the encoders in
``students.py`` to the scores; ``judging.py`` compares before and after; ``saving.py`` writes the encoder. ``tune.py``
runs all steps.
"""
