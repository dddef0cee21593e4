"""Vectors of nine numbers, in which clients pass tensors of pressure, in rows."""

import warp as wp

vec9f = wp.types.vector(length=9, dtype=wp.float32)
vec9d = wp.types.vector(length=9, dtype=wp.float64)
