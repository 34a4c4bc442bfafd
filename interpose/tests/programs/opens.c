// Loads a library. usage: opens LIBRARY
#include <dlfcn.h>

int main(int count, char **arguments) { return count != 2 || !dlopen(arguments[1], RTLD_NOW); }
