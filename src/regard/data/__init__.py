"""Data: readers of tables, images and audio; splits, tokenizers and batches."""
