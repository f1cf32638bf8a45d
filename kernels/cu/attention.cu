// Latent attention (MLA): decode in the absorbed form, prefill in the materialised one. attention.cuh says what the macros mean.
#include "attention_decode.cuh"
#include "attention_prefill.cuh"

// For the host: dynamic shared memory of mla_attend, mla_project, mla_expand and mla_prefill in bytes; the rows and the threads of a block of mla_prefill.
extern "C" __device__ const int mla_launch[6] = {ATTEND_SHARED, PROJECT_SHARED, EXPAND_SHARED, PREFILL_SHARED, P_ROWS, P_THREADS};
