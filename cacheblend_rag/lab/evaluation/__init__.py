"""Quality of every method on data sets, with intervals; the paper's figures on your own model."""
