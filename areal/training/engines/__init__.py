"""Train engines: a model, its optimizer and its ranks behind one contract (``areal.api.engine_api.TrainEngine``)."""
