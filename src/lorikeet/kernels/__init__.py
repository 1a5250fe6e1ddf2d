"""The arithmetic of a model behind one interface, with three backends: reference (torch), native (C++), Triton."""
