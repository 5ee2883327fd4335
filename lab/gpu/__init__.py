"""The hour with a GPU: measurements, then the missing runs of the queue, `python -m lab.gpu`."""
