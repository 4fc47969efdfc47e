"""The programs behind `peftkit bench`: a figure counts only beside its peer and its floor, from one run on one card."""
