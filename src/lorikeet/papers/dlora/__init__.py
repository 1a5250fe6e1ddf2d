"""dLoRA: merged and unmerged batches, placement by burst tolerance, dispatch by pending time, co-migration."""
