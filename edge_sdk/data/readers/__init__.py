"""Readers of files: each turns the files of one kind into blocks of raw samples."""
