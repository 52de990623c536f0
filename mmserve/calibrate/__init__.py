"""Calibration of typed questions: the questions, and fitting of temperature and bias of the probabilities."""
