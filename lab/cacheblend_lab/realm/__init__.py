"""Trains REALM (arXiv 2002.08909): a retriever that learns which passages help its encoder fill masks and find answers.

``passages.py`` and ``examples.py`` make the training data of ``model.py``. ``pretrain.py`` and ``finetune.py`` train
the model; both use ``runs.py``, which resumes a killed run, and ``renewal.py``, which rebuilds the index in a separate
process. ``evaluate.py`` answers questions. No :class:`~cacheblend_rag.rag.pipeline.RagPipeline` can use these models.
"""
