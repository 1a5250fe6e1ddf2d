"""The commands of ``lorikeet``. Modules here import torch only inside the function that computes."""
