"""Thin bridges to libraries that run models; each imports its library when it is imported itself."""
