// A driver of before CUDA 12.8, as far as a program goes that only initialises it: it has no checkpoint calls.
int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
