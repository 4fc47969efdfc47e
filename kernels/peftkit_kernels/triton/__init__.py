"""Triton kernels: functions of the same names and signatures as the references; `dispatch.TRITON` says which."""
