"""The arithmetic of a model behind one interface; backends: reference (torch), native (C++), Triton (GPUs)."""
