"""A model's arithmetic behind one interface, with three backends: reference (torch), native (C++) and Triton."""
