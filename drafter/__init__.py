"""The parts that train.py, model_io.py, server.py and the scripts are built from."""
