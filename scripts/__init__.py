"""Steps that people run by hand: python -m scripts.NAME --recipe R."""
