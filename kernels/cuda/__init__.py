"""Operations on CUDA devices."""
