"""GGUF, llama.cpp's file format: header, blocks, names of tensors, and the conversion to a model folder."""
