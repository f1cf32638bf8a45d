// Matrix products of one to sixteen tokens over weights in layout mma16.v1, and the two kernels of a mixture-of-experts layer.
//
// Weights are the A operand of mma.m16n8k16, tokens its eight columns. Quants go into the tensor cores as they are: an unsigned
// integer of up to ten bits is a subnormal f16, n * 2^-24, so unpacking is masking. Scales multiply the f32 sums of their group, and
// what a type subtracts (a minimum, or half of its range) is one more product, of the scales with the sums of the activations.
#include "decode_products.cuh"
#include "decode_experts.cuh"
#include "decode_one.cuh"
