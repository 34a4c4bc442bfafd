//! A network of two layers with Adam, on the device.

use std::sync::Arc;

use anyhow::Result;
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

use crate::ranks::{Communicator, Ranks};

const PTX: &str = include_str!("kernels.ptx");
const THREADS: u32 = 128;
/// Side of a tile of the kernel `matmul`.
const TILE: u32 = 16;
const LEARNING_RATE: f32 = 1e-2;

/// Sizes of the layers and of a batch.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Rows of a batch.
    pub batch: u32,
    /// Inputs of a row.
    pub inputs: u32,
    /// Neurons of the hidden layer.
    pub hidden: u32,
    /// Neurons of the last layer.
    pub classes: u32,
}

struct Kernels {
    matmul: CudaFunction,
    add_bias: CudaFunction,
    relu_backward: CudaFunction,
    sum_rows: CudaFunction,
    softmax_loss: CudaFunction,
    adam: CudaFunction,
    make_batch: CudaFunction,
}

/// A tensor of weights with what Adam needs for it.
struct Parameter {
    weight: CudaSlice<f32>,
    gradient: CudaSlice<f32>,
    mean: CudaSlice<f32>,
    variance: CudaSlice<f32>,
}

/// Everything that lives on the device.
pub struct Network {
    shape: Shape,
    stream: Arc<CudaStream>,
    kernels: Kernels,
    inputs: CudaSlice<f32>,
    labels: CudaSlice<i32>,
    hidden: CudaSlice<f32>,
    hidden_gradient: CudaSlice<f32>,
    logits: CudaSlice<f32>,
    losses: CudaSlice<f32>,
    /// Weight and bias of the first layer, then of the second.
    parameters: [Parameter; 4],
    parallel: Option<Parallel>,
}

/// This process is one of several that train together.
struct Parallel {
    communicator: Communicator,
    rank: u32,
    count: u32,
}

impl Network {
    /// Loads the kernels and allocates; the weights are the same each time.
    pub fn new(context: &Arc<CudaContext>, shape: Shape) -> Result<Self> {
        let stream = context.new_stream()?;
        let module = context.load_module(Ptx::from_src(PTX))?;
        let load = |name: &str| module.load_function(name);
        let kernels = Kernels {
            matmul: load("matmul")?,
            add_bias: load("add_bias")?,
            relu_backward: load("relu_backward")?,
            sum_rows: load("sum_rows")?,
            softmax_loss: load("softmax_loss")?,
            adam: load("adam")?,
            make_batch: load("make_batch")?,
        };
        let Shape { batch, inputs, hidden, classes } = shape;
        let zeros = |count: u32| stream.alloc_zeros::<f32>(count as usize);
        let parameters = [
            Parameter::new(&stream, inputs * hidden, inputs, 1)?,
            Parameter::new(&stream, hidden, 0, 2)?,
            Parameter::new(&stream, hidden * classes, hidden, 3)?,
            Parameter::new(&stream, classes, 0, 4)?,
        ];
        Ok(Self {
            shape,
            inputs: zeros(batch * inputs)?,
            labels: stream.alloc_zeros(batch as usize)?,
            hidden: zeros(batch * hidden)?,
            hidden_gradient: zeros(batch * hidden)?,
            logits: zeros(batch * classes)?,
            losses: zeros(batch)?,
            kernels,
            stream,
            parameters,
            parallel: None,
        })
    }

    /// Trains together with the other ranks from now on.
    pub fn join(&mut self, ranks: &mut Ranks) -> Result<()> {
        let communicator = ranks.communicator(&self.stream)?;
        let (rank, count) = (u32::try_from(ranks.rank)?, u32::try_from(ranks.count)?);
        self.parallel = Some(Parallel { communicator, rank, count });
        Ok(())
    }

    /// One step of training on the batch that belongs to `step` and this rank; the mean loss before it, over all ranks.
    pub fn step(&mut self, step: u32) -> Result<f32> {
        let batch = self.parallel.as_ref().map_or(step, |ranks| (step - 1) * ranks.count + ranks.rank + 1);
        self.make_batch(batch)?;
        self.forward()?;
        self.backward()?;
        if let Some(ranks) = &self.parallel {
            let gradients = self.parameters.iter_mut().map(|parameter| &mut parameter.gradient);
            ranks.communicator.mean(gradients.chain([&mut self.losses]))?;
        }
        self.update(step)?;
        let losses = self.stream.clone_dtoh(&self.losses)?;
        Ok(losses.iter().sum::<f32>() / self.shape.batch as f32)
    }

    fn make_batch(&mut self, step: u32) -> Result<()> {
        let Shape { batch, inputs, classes, .. } = self.shape;
        let mut launch = self.stream.launch_builder(&self.kernels.make_batch);
        launch.arg(&mut self.inputs).arg(&mut self.labels).arg(&batch).arg(&inputs).arg(&classes).arg(&step);
        // SAFETY: the arguments are those of the kernel, the buffers have the sizes that it is told.
        unsafe { launch.launch(over(batch)) }?;
        Ok(())
    }

    fn forward(&mut self) -> Result<()> {
        let Shape { batch, inputs, hidden, classes } = self.shape;
        let [weight1, bias1, weight2, bias2] = &self.parameters;
        let (stream, kernels) = (&self.stream, &self.kernels);
        let flat = Flip { a: false, b: false };
        matmul(
            stream,
            kernels,
            &self.inputs,
            &weight1.weight,
            &mut self.hidden,
            [batch, hidden, inputs],
            flat,
        )?;
        add_bias(stream, kernels, &mut self.hidden, &bias1.weight, [batch, hidden], true)?;
        matmul(
            stream,
            kernels,
            &self.hidden,
            &weight2.weight,
            &mut self.logits,
            [batch, classes, hidden],
            flat,
        )?;
        add_bias(stream, kernels, &mut self.logits, &bias2.weight, [batch, classes], false)?;
        let mut launch = stream.launch_builder(&kernels.softmax_loss);
        launch.arg(&mut self.logits).arg(&self.labels).arg(&mut self.losses).arg(&batch).arg(&classes);
        // SAFETY: the arguments are those of the kernel, the buffers have the sizes that it is told.
        unsafe { launch.launch(over(batch)) }?;
        Ok(())
    }

    /// From the gradient of the logits, which [`Self::forward`] left, to those of all parameters.
    fn backward(&mut self) -> Result<()> {
        let Shape { batch, inputs, hidden, classes } = self.shape;
        let [weight1, bias1, weight2, bias2] = &mut self.parameters;
        let (stream, kernels) = (&self.stream, &self.kernels);
        let a = Flip { a: true, b: false };
        let b = Flip { a: false, b: true };
        matmul(
            stream,
            kernels,
            &self.hidden,
            &self.logits,
            &mut weight2.gradient,
            [hidden, classes, batch],
            a,
        )?;
        sum_rows(stream, kernels, &self.logits, &mut bias2.gradient, [batch, classes])?;
        let gradient = &mut self.hidden_gradient;
        matmul(stream, kernels, &self.logits, &weight2.weight, gradient, [batch, hidden, classes], b)?;
        let count = batch * hidden;
        let mut launch = stream.launch_builder(&kernels.relu_backward);
        launch.arg(&mut *gradient).arg(&self.hidden).arg(&count);
        // SAFETY: the arguments are those of the kernel, the buffers have the sizes that it is told.
        unsafe { launch.launch(over(count)) }?;
        matmul(stream, kernels, &self.inputs, gradient, &mut weight1.gradient, [inputs, hidden, batch], a)?;
        sum_rows(stream, kernels, gradient, &mut bias1.gradient, [batch, hidden])
    }

    fn update(&mut self, step: u32) -> Result<()> {
        let power = |beta: f64| (1.0 / (1.0 - beta.powi(step.cast_signed()))) as f32;
        let (scale1, scale2) = (power(0.9), power(0.999));
        for parameter in &mut self.parameters {
            let count = u32::try_from(parameter.weight.len())?;
            let mut launch = self.stream.launch_builder(&self.kernels.adam);
            launch.arg(&mut parameter.weight).arg(&mut parameter.mean).arg(&mut parameter.variance);
            launch.arg(&parameter.gradient).arg(&count).arg(&LEARNING_RATE).arg(&scale1).arg(&scale2);
            // SAFETY: the arguments are those of the kernel, the buffers have the sizes that it is told.
            unsafe { launch.launch(over(count)) }?;
        }
        Ok(())
    }
}

impl Parameter {
    /// Weights in ±1/sqrt(fan_in), or zeros for a fan-in of 0.
    fn new(stream: &Arc<CudaStream>, count: u32, fan_in: u32, seed: u32) -> Result<Self> {
        let scale = if fan_in == 0 { 0.0 } else { 1.0 / (fan_in as f32).sqrt() };
        let mut state = seed;
        let weights: Vec<f32> = (0..count)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale
            })
            .collect();
        Ok(Self {
            weight: stream.clone_htod(&weights)?,
            gradient: stream.alloc_zeros(count as usize)?,
            mean: stream.alloc_zeros(count as usize)?,
            variance: stream.alloc_zeros(count as usize)?,
        })
    }
}

/// Which factor of a product is stored transposed.
#[derive(Clone, Copy)]
struct Flip {
    a: bool,
    b: bool,
}

/// `c = a b` with `[rows, columns, inner]`.
fn matmul(
    stream: &Arc<CudaStream>,
    kernels: &Kernels,
    a: &CudaSlice<f32>,
    b: &CudaSlice<f32>,
    c: &mut CudaSlice<f32>,
    [rows, cols, inner]: [u32; 3],
    flip: Flip,
) -> Result<()> {
    let grid_dim = (cols.div_ceil(TILE), rows.div_ceil(TILE), 1);
    let config = LaunchConfig { grid_dim, block_dim: (TILE, TILE, 1), shared_mem_bytes: 0 };
    let (flip_a, flip_b) = (i32::from(flip.a), i32::from(flip.b));
    let mut launch = stream.launch_builder(&kernels.matmul);
    launch.arg(a).arg(b).arg(c).arg(&rows).arg(&cols).arg(&inner).arg(&flip_a).arg(&flip_b);
    // SAFETY: the arguments are those of the kernel, the buffers have the sizes that it is told.
    unsafe { launch.launch(config) }?;
    Ok(())
}

fn add_bias(
    stream: &Arc<CudaStream>,
    kernels: &Kernels,
    x: &mut CudaSlice<f32>,
    bias: &CudaSlice<f32>,
    [rows, cols]: [u32; 2],
    relu: bool,
) -> Result<()> {
    let relu = i32::from(relu);
    let mut launch = stream.launch_builder(&kernels.add_bias);
    launch.arg(x).arg(bias).arg(&rows).arg(&cols).arg(&relu);
    // SAFETY: the arguments are those of the kernel, the buffers have the sizes that it is told.
    unsafe { launch.launch(over(rows * cols)) }?;
    Ok(())
}

fn sum_rows(
    stream: &Arc<CudaStream>,
    kernels: &Kernels,
    x: &CudaSlice<f32>,
    sums: &mut CudaSlice<f32>,
    [rows, cols]: [u32; 2],
) -> Result<()> {
    let mut launch = stream.launch_builder(&kernels.sum_rows);
    launch.arg(x).arg(sums).arg(&rows).arg(&cols);
    // SAFETY: the arguments are those of the kernel, the buffers have the sizes that it is told.
    unsafe { launch.launch(over(cols)) }?;
    Ok(())
}

/// One thread for each of `count`.
fn over(count: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (count.div_ceil(THREADS), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    }
}
