/* The part of nvcc's own header that `driver_types.h` of the runtime wheel needs under gcc. */
#pragma once
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __location__(a)
#define __device__
#define __host__
#define CUDARTAPI
#define CUDARTAPI_CDECL
