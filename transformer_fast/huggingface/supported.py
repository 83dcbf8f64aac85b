"""Table of classes of Hugging Face transformers, and the versions of transformers for which the tests have shown it."""

from __future__ import annotations

import sys

VERSIONS = (5, 23), (5, 24)
"""Versions of transformers whose classes are known. The code of a class may differ in any other one."""

_CLASSES = {
    "DropoutAddNorm": """
        align: AlignTextOutput AlignTextSelfOutput, altclip: AltRobertaOutput AltRobertaSelfOutput,
        bert: BertOutput BertSelfOutput, bert_generation: BertGenerationOutput BertGenerationSelfOutput,
        big_bird: BigBirdOutput BigBirdSelfOutput, blip/blip_text: BlipTextOutput BlipTextSelfOutput,
        blip_2: Blip2QFormerOutput Blip2QFormerSelfOutput, bridgetower: BridgeTowerOutput BridgeTowerSelfOutput,
        bros: BrosOutput BrosSelfOutput, camembert: CamembertOutput CamembertSelfOutput,
        canine: CanineOutput CanineSelfOutput, chinese_clip: ChineseCLIPTextOutput ChineseCLIPTextSelfOutput,
        clap: ClapTextOutput ClapTextSelfOutput, convbert: ConvBertOutput ConvBertSelfOutput, cpmant: CpmAntOutput,
        data2vec/data2vec_text: Data2VecTextOutput Data2VecTextSelfOutput, deberta: DebertaOutput DebertaSelfOutput,
        deberta_v2: DebertaV2Output DebertaV2SelfOutput, electra: ElectraOutput ElectraSelfOutput,
        ernie: ErnieOutput ErnieSelfOutput, fnet: FNetOutput, git: GitOutput GitSelfOutput,
        instructblip: InstructBlipQFormerOutput InstructBlipQFormerSelfOutput,
        instructblipvideo: InstructBlipVideoQFormerOutput InstructBlipVideoQFormerSelfOutput,
        layoutlm: LayoutLMOutput LayoutLMSelfOutput, layoutlmv2: LayoutLMv2Output LayoutLMv2SelfOutput,
        layoutlmv3: LayoutLMv3Output LayoutLMv3SelfOutput, lilt: LiltOutput LiltSelfOutput,
        longformer: LongformerOutput LongformerSelfOutput, luke: LukeOutput LukeSelfOutput,
        lxmert: LxmertAttentionOutput LxmertOutput, markuplm: MarkupLMOutput MarkupLMSelfOutput, mpnet: MPNetOutput,
        mra: MraOutput MraSelfOutput, nystromformer: NystromformerOutput NystromformerSelfOutput,
        rembert: RemBertOutput RemBertSelfOutput, roberta: RobertaOutput RobertaSelfOutput,
        roc_bert: RoCBertOutput RoCBertSelfOutput, roformer: RoFormerOutput RoFormerSelfOutput,
        sew_d: SEWDOutput SEWDSelfOutput, splinter: SplinterOutput SplinterSelfOutput,
        tapas: TapasOutput TapasSelfOutput, visual_bert: VisualBertOutput VisualBertSelfOutput,
        xlm_roberta: XLMRobertaOutput XLMRobertaSelfOutput, yoso: YosoOutput YosoSelfOutput
    """,
    "DropoutAdd": """
        dpt: DPTViTOutput, esm: EsmOutput EsmSelfOutput, evolla: EvollaSaProtOutput EvollaSaProtSelfOutput,
        flava: FlavaOutput, mobilevit: MobileViTOutput,
        roberta_prelayernorm: RobertaPreLayerNormOutput RobertaPreLayerNormSelfOutput, videomae: VideoMAEOutput,
        vilt: ViltOutput, xlm_roberta_xl: XLMRobertaXLSelfOutput, xmod: XmodSelfOutput, yolos: YolosOutput
    """,
    "ActivatedLinear": """
        align: AlignTextIntermediate, altclip: AltRobertaIntermediate, bert: BertIntermediate,
        bert_generation: BertGenerationIntermediate, big_bird: BigBirdIntermediate,
        blip/blip_text: BlipTextIntermediate, blip_2: Blip2QFormerIntermediate, bridgetower: BridgeTowerIntermediate,
        bros: BrosIntermediate, camembert: CamembertIntermediate, canine: CanineIntermediate,
        chinese_clip: ChineseCLIPTextIntermediate, clap: ClapAudioIntermediate ClapTextIntermediate,
        convbert: ConvBertIntermediate, cpmant: CpmAntIntermediate, data2vec/data2vec_text: Data2VecTextIntermediate,
        data2vec/data2vec_vision: Data2VecVisionIntermediate, deberta: DebertaIntermediate,
        deberta_v2: DebertaV2Intermediate, dinat: DinatIntermediate, donut/donut_swin: DonutSwinIntermediate,
        dpt: DPTViTIntermediate, electra: ElectraIntermediate, ernie: ErnieIntermediate, flava: FlavaIntermediate,
        fnet: FNetIntermediate, git: GitIntermediate, instructblip: InstructBlipQFormerIntermediate,
        instructblipvideo: InstructBlipVideoQFormerIntermediate, layoutlm: LayoutLMIntermediate,
        layoutlmv2: LayoutLMv2Intermediate, layoutlmv3: LayoutLMv3Intermediate, lilt: LiltIntermediate,
        longformer: LongformerIntermediate, luke: LukeIntermediate, lxmert: LxmertIntermediate,
        markuplm: MarkupLMIntermediate, maskformer/maskformer_swin: MaskFormerSwinIntermediate,
        megatron_bert: MegatronBertIntermediate, mobilebert: MobileBertIntermediate, mobilevit: MobileViTIntermediate,
        mpnet: MPNetIntermediate, mra: MraIntermediate, nystromformer: NystromformerIntermediate,
        pp_doclayout_v2: PPDocLayoutV2ReadingOrderIntermediate, rembert: RemBertIntermediate,
        roberta: RobertaIntermediate, roc_bert: RoCBertIntermediate, roformer: RoFormerIntermediate,
        sew_d: SEWDIntermediate, splinter: SplinterIntermediate, swin2sr: Swin2SRIntermediate,
        swinv2: Swinv2Intermediate, tapas: TapasIntermediate, tvp: TvpIntermediate, videomae: VideoMAEIntermediate,
        vilt: ViltIntermediate, visual_bert: VisualBertIntermediate, xlm_roberta: XLMRobertaIntermediate,
        xlm_roberta_xl: XLMRobertaXLIntermediate, xmod: XmodIntermediate, yolos: YolosIntermediate,
        yoso: YosoIntermediate
    """,
    "FeedForward": """
        altclip: AltCLIPMLP, audio_spectrogram_transformer: ASTMLP, axk2: AXK2GateMLP, beit: BeitMLP, blip: BlipMLP,
        blip_2: Blip2MLP, canary: CanaryDecoderMLP, chinese_clip: ChineseCLIPVisionMLP, clip: CLIPMLP,
        clipseg: CLIPSegMLP, cohere_asr: CohereAsrDecoderMLP, cosmos3_edge: Cosmos3EdgeMLP Cosmos3EdgeTextMLP,
        deit: DeiTMLP, dinov2: Dinov2MLP, dinov2_with_registers: Dinov2WithRegistersMLP, eomt: EomtMLP,
        florence2: Florence2VisionMLP, git: GitVisionMLP, glm_image: GlmImageVisionMLP,
        gradium_phonon_tts: GradiumPhononTTSMLP, granite_docling: GraniteDoclingVisionMLP, groupvit: GroupViTMLP,
        hiera: HieraMlp, hunyuan_vl: HunYuanVLVisionMLP, hy_v4_vl: HYV4VLVisionMLP, idefics2: Idefics2VisionMLP,
        idefics3: Idefics3VisionMLP, ijepa: IJepaMLP, inkling2: Inkling2VisionMLP, instructblip: InstructBlipMLP,
        instructblipvideo: InstructBlipVideoMLP, internvl: InternVLVisionMLP, jina_embeddings_v3: JinaEmbeddingsV3MLP,
        kosmos2: Kosmos2VisionMLP, llama4: Llama4VisionMLP, metaclip_2: MetaClip2MLP, mimi: MimiMLP,
        minicpm_ocr: MiniCPMOcrVisionMLP, minicpmv4_6: MiniCPMV4_6VisionMLP, minicpmv4_7: MiniCPMV4_7VisionMLP,
        minimax_m3_vl: MiniMaxM3VLVisionMLP, mlcd: MLCDMLP, mllama: MllamaVisionMLP, molmo2: Molmo2VisionMLP,
        moonshine: MoonshineEncoderMLP, moonshine_streaming: MoonshineStreamingEncoderMLP,
        muse_spark: MuseSparkAudioMLP, nanochat: NanoChatMLP, nemotron3_5_transcribe: Nemotron3_5TranscribeMLP,
        nemotron3_diarization: Nemotron3DiarizationMLP, neucodec: NeuCodecMLP, oneformer: OneFormerTextMLP,
        owlv2: Owlv2MLP, owlvit: OwlViTMLP, paddleocr_vl: PaddleOCRVisionMLP, phi: PhiMLP,
        phi4_multimodal: Phi4MultimodalVisionMLP, pixio: PixioMLP, pocket_tts: PocketTTSMLP,
        pocket_tts_audio_tokenizer: PocketTTSAudioTokenizerMLP, qianfan_ocr: QianfanOCRVisionMLP, radio: RadioMLP,
        rf_detr: RfDetrDinov2MLP RfDetrSegmentationMLP, sam3_lite_text: Sam3LiteTextConvMLP Sam3LiteTextTextMLP,
        siglip: SiglipMLP, siglip2: Siglip2MLP, smolvlm: SmolVLMVisionMLP, step3p7: Step3p7VisionMLP, swin: SwinMLP,
        timesfm2_5: TimesFm2_5MLP, tipsv2: Tipsv2MLP Tipsv2VisionMLP, unlimited_ocr: UnlimitedOcrMLP,
        vibevoice: VibeVoiceDiffusionHeadMLP, video_llama_3: VideoLlama3VisionMLP, videomt: VideomtMLP,
        videoprism: VideoPrismMLP, vit: ViTMLP, vit_mae: ViTMAEMLP, vit_msn: ViTMSNMLP, vivit: VivitMLP,
        x_clip: XCLIPMLP, xcodec2: Xcodec2MLP
    """,
    "DistilBertFeedForward": """
        distilbert: FFN
    """,
    "RMSNorm": """
        afmoe: AfmoeRMSNorm, aimv2: Aimv2RMSNorm, apertus: ApertusRMSNorm, apertus1p5: Apertus1p5TextRMSNorm,
        arcee: ArceeRMSNorm, aria: AriaTextRMSNorm, axk1: AXK1RMSNorm, axk2: AXK2RMSNorm,
        bailing_hybrid: BailingHybridRMSNorm, bamba: BambaRMSNorm, beam: BeamRMSNorm, bitnet: BitNetRMSNorm,
        blt: BltRMSNorm, chameleon: ChameleonRMSNorm, clvp: ClvpRMSNorm, cohere2_moe: Cohere2MoeRMSNorm,
        cosmos3_edge: Cosmos3EdgeTextRMSNorm, csm: CsmRMSNorm, cwm: CwmRMSNorm,
        deepseek_ocr2: DeepseekOcr2TextRMSNorm DeepseekOcr2VisionRMSNorm, deepseek_v2: DeepseekV2RMSNorm,
        deepseek_v3: DeepseekV3RMSNorm, deepseek_v32: DeepseekV32RMSNorm, deepseek_v4: DeepseekV4RMSNorm,
        deimv2: Deimv2RMSNorm, dia: DiaRMSNorm, diffllama: DiffLlamaRMSNorm, doge: DogeRMSNorm, dots1: Dots1RMSNorm,
        dots3_note: Dots3NoteRMSNorm, emu3: Emu3RMSNorm, ernie4_5: Ernie4_5RMSNorm, ernie4_5_moe: Ernie4_5_MoeRMSNorm,
        ernie4_5_vl_moe: Ernie4_5_VLMoeRMSNorm, eurobert: EuroBertRMSNorm, evolla: EvollaRMSNorm,
        exaone4: Exaone4RMSNorm, exaone4_5: Exaone4_5_RMSNorm, exaone_moe: ExaoneMoeRMSNorm,
        falcon_h1: FalconH1RMSNorm, falcon_mamba: FalconMambaRMSNorm, flex_olmo: FlexOlmoRMSNorm, flint: FlintRMSNorm,
        glm: GlmRMSNorm, glm4: Glm4RMSNorm, glm4_moe: Glm4MoeRMSNorm, glm4_moe_lite: Glm4MoeLiteRMSNorm,
        glm4v: Glm4vRMSNorm, glm4v_moe: Glm4vMoeRMSNorm Glm4vMoeTextRMSNorm,
        glm5_next: Glm5NextRMSNorm Glm5NextTextRMSNorm, glm_image: GlmImageRMSNorm, glm_moe_dsa: GlmMoeDsaRMSNorm,
        glm_ocr: GlmOcrRMSNorm, gpt_oss: GptOssRMSNorm, granite: GraniteRMSNorm,
        granite4_vision: Granite4VisionTextRMSNorm, granite_docling: GraniteDoclingTextRMSNorm,
        granite_swa: GraniteSWARMSNorm, granitemoe: GraniteMoeRMSNorm, granitemoe_swa: GraniteMoeSWARMSNorm,
        granitemoehybrid: GraniteMoeHybridRMSNorm, granitemoeshared: GraniteMoeSharedRMSNorm, helium: HeliumRMSNorm,
        higgs_audio_v2: HiggsAudioV2RMSNorm, hunyuan_v1_dense: HunYuanDenseV1RMSNorm,
        hunyuan_v1_moe: HunYuanMoEV1RMSNorm, hunyuan_vl: HunYuanVLRMSNorm, hy_v3: HYV3RMSNorm, hy_v4: HYV4RMSNorm,
        hy_v4_vl: HYV4VLRMSNorm, hyperclovax: HyperCLOVAXRMSNorm, idefics: IdeficsRMSNorm, idefics2: Idefics2RMSNorm,
        idefics3: Idefics3RMSNorm, inkling: InklingRMSNorm, inkling2: Inkling2RMSNorm,
        inkling2_loop: Inkling2LoopRMSNorm, internvl: InternVLVisionRMSNorm, jamba: JambaRMSNorm,
        jetmoe: JetMoeRMSNorm, kimi_linear: KimiLinearRMSNorm, kolibri1: Kolibri1RMSNorm,
        kosmos2_5: Kosmos2_5LayerNorm, laguna: LagunaRMSNorm, lara_mini: LaraMiniRMSNorm, lfm2: Lfm2RMSNorm,
        lfm2_moe: Lfm2MoeRMSNorm, lfm3: Lfm3RMSNorm, lfm3_vl: Lfm3VlVisionRMSNorm, lighton_ocr: LightOnOcrRMSNorm,
        llama: LlamaRMSNorm, longcat_flash: LongcatFlashRMSNorm, longt5: LongT5LayerNorm, mamba: MambaRMSNorm,
        mamba2: Mamba2RMSNorm, mellum: MellumRMSNorm, mimo_v2_flash: MiMoV2FlashRMSNorm, minicpm3: MiniCPM3RMSNorm,
        minimax: MiniMaxRMSNorm, minimax_m2: MiniMaxM2RMSNorm, ministral: MinistralRMSNorm,
        ministral3: Ministral3RMSNorm, mistral: MistralRMSNorm, mistral3: Mistral3RMSNorm, mistral4: Mistral4RMSNorm,
        mistral_large4: MistralLarge4RMSNorm, mixtral: MixtralRMSNorm, mllama: MllamaTextRMSNorm,
        molmo2: Molmo2RMSNorm, mt5: MT5LayerNorm, muse_glimmer_assistant: MuseGlimmerAssistantRMSNorm,
        nemotron_h: NemotronHRMSNorm, nemotron_h_omni: NemotronH_Omni_RMSNorm, neucodec: NeuCodecRMSNorm,
        olmo2: Olmo2RMSNorm, olmo3: Olmo3RMSNorm, olmo_hybrid: OlmoHybridRMSNorm, olmoe: OlmoeRMSNorm,
        openai_privacy_filter: OpenAIPrivacyFilterRMSNorm, ovis2: Ovis2RMSNorm, paddleocr_vl: PaddleOCRRMSNorm,
        pe_audio: PeAudioEncoderRMSNorm, pe_audio_video: PeAudioVideoEncoderRMSNorm, pe_video: PeVideoEncoderRMSNorm,
        phi3: Phi3RMSNorm, phi4_multimodal: Phi4MultimodalRMSNorm, pix2struct: Pix2StructLayerNorm,
        pixtral: PixtralRMSNorm, pop2piano: Pop2PianoLayerNorm, qianfan_ocr: QianfanOCRVisionRMSNorm,
        qwen2: Qwen2RMSNorm, qwen2_5_omni: Qwen2_5OmniRMSNorm, qwen2_5_vl: Qwen2_5_VLRMSNorm,
        qwen2_moe: Qwen2MoeRMSNorm, qwen2_vl: Qwen2VLRMSNorm, qwen3: Qwen3RMSNorm, qwen3_moe: Qwen3MoeRMSNorm,
        qwen3_omni_moe: Qwen3OmniMoeCode2WavRMSNorm Qwen3OmniMoeRMSNorm Qwen3OmniMoeTextRMSNorm
            Qwen3OmniMoeThinkerTextRMSNorm,
        qwen3_vl: Qwen3VLTextRMSNorm, qwen3_vl_moe: Qwen3VLMoeTextRMSNorm, sapiens2: Sapiens2RMSNorm,
        seed_oss: SeedOssRMSNorm, smollm3: SmolLM3RMSNorm, solar_open: SolarOpenRMSNorm,
        switch_transformers: SwitchTransformersLayerNorm, t5: T5LayerNorm, timesfm: TimesFmRMSNorm,
        timesfm2_5: TimesFm2_5RMSNorm, udop: UdopLayerNorm, ultrabert: UltrabertRMSNorm, ultravbert: UltraVBertRMSNorm,
        umt5: UMT5LayerNorm, unlimited_ocr: UnlimitedOcrTextRMSNorm, vibevoice: VibeVoiceRMSNorm,
        vibevoice_acoustic_tokenizer: VibeVoiceAcousticTokenizerRMSNorm, vibevoice_asr: VibeVoiceAsrRMSNorm,
        voxtral_realtime: VoxtralRealtimeRMSNorm, xcodec2: Xcodec2RMSNorm, youtu: YoutuRMSNorm, zamba: ZambaRMSNorm,
        zamba2: Zamba2RMSNorm, zaya: ZayaRMSNorm
    """,
    "RMSNormOfEps": """
        diffusion_gemma: DiffusionGemmaRMSNorm, embedding_gemma2: EmbeddingGemma2RMSNorm, gemma3n: Gemma3nRMSNorm,
        gemma4: Gemma4RMSNorm, gemma4_unified: Gemma4UnifiedRMSNorm, kyutai_speech_to_text: KyutaiSpeechToTextRMSNorm,
        llama4: Llama4TextRMSNorm, moshi: MoshiRMSNorm, muse_glimmer: MuseGlimmerRMSNorm, muse_spark: MuseSparkRMSNorm,
        neomme: NeoMMERMSNorm
    """,
    "LayerNorm": """
        cohere: CohereLayerNorm, cohere2: Cohere2LayerNorm, cohere2_moe: Cohere2MoeLayerNorm,
        cohere_compass: CohereCompassLayerNorm, deberta: DebertaLayerNorm
    """,
    "ReluFeedForward": """
        longt5: LongT5DenseActDense, mt5: MT5DenseActDense, pop2piano: Pop2PianoDenseActDense,
        switch_transformers: SwitchTransformersDenseActDense, t5: T5DenseActDense, udop: UdopDenseActDense,
        umt5: UMT5DenseActDense
    """,
    "FeedForwardAdd": """
        longt5: LongT5LayerFF, mt5: MT5LayerFF, pix2struct: Pix2StructTextLayerFF, pop2piano: Pop2PianoLayerFF,
        t5: T5LayerFF, udop: UdopLayerFF, umt5: UMT5LayerFF
    """,
    "RelativeAttention": """
        longt5: LongT5Attention, mt5: MT5Attention, pop2piano: Pop2PianoAttention,
        switch_transformers: SwitchTransformersAttention, t5: T5Attention, udop: UdopAttention
    """,
    "BertLayer": """
        bert: BertLayer, camembert: CamembertLayer, data2vec/data2vec_text: Data2VecTextLayer, electra: ElectraLayer,
        ernie: ErnieLayer, roberta: RobertaLayer, roc_bert: RoCBertLayer, xlm_roberta: XLMRobertaLayer
    """,
    "EncoderLayer": """
        bart: BartEncoderLayer, blenderbot_small: BlenderbotSmallEncoderLayer, informer: InformerEncoderLayer,
        marian: MarianEncoderLayer, plbart: PLBartEncoderLayer,
        time_series_transformer: TimeSeriesTransformerEncoderLayer
    """,
    "PreNormEncoderLayer": """
        audioflamingo3: AudioFlamingo3EncoderLayer, blenderbot: BlenderbotEncoderLayer, m2m_100: M2M100EncoderLayer,
        mbart: MBartEncoderLayer, moss_transcribe_diarize: MossTranscribeDiarizeAudioLayer,
        pegasus: PegasusEncoderLayer, qwen2_audio: Qwen2AudioEncoderLayer, speech_to_text: Speech2TextEncoderLayer,
        voxtral: VoxtralEncoderLayer, whisper: WhisperEncoderLayer
    """,
    "DecoderLayer": """
        bart: BartDecoderLayer, blenderbot_small: BlenderbotSmallDecoderLayer, informer: InformerDecoderLayer,
        marian: MarianDecoderLayer, plbart: PLBartDecoderLayer,
        time_series_transformer: TimeSeriesTransformerDecoderLayer
    """,
    "PreNormDecoderLayer": """
        bigbird_pegasus: BigBirdPegasusDecoderLayer, blenderbot: BlenderbotDecoderLayer, m2m_100: M2M100DecoderLayer,
        mbart: MBartDecoderLayer, musicgen: MusicgenDecoderLayer, pegasus: PegasusDecoderLayer,
        pegasus_x: PegasusXDecoderLayer, pp_formulanet: PPFormulaNetDecoderLayer,
        speech_to_text: Speech2TextDecoderLayer, whisper: WhisperDecoderLayer, xglm: XGLMDecoderLayer
    """,
}
"""Classes by the name of their fast class in ``blocks.py`` or ``whole_layers.py``: the folder of a model, a file if its
name differs from that of the folder, and the classes in the file. Classes of one fast class have the same code."""

_STACKS = {
    "Encoder": """
        albert: AlbertTransformer, bert: BertEncoder, camembert: CamembertEncoder,
        data2vec/data2vec_text: Data2VecTextEncoder, electra: ElectraEncoder, ernie: ErnieEncoder,
        roberta: RobertaEncoder, roberta_prelayernorm: RobertaPreLayerNormEncoder, roc_bert: RoCBertEncoder,
        xlm_roberta: XLMRobertaEncoder
    """,
    "EncoderOfDistilBert": "distilbert: Transformer",
    "Model": """
        apertus: ApertusModel, arcee: ArceeModel, cohere: CohereModel, cohere2: Cohere2Model, ernie4_5: Ernie4_5Model,
        gemma: GemmaModel, gemma2: Gemma2Model, glm: GlmModel, glm4: Glm4Model, gpt2: GPT2Model,
        gpt_bigcode: GPTBigCodeModel, gpt_neox: GPTNeoXModel, granite: GraniteModel, helium: HeliumModel,
        llama: LlamaModel, ministral: MinistralModel, ministral3: Ministral3Model, mistral: MistralModel,
        olmo: OlmoModel, olmo2: Olmo2Model, olmo3: Olmo3Model, phi: PhiModel, phi3: Phi3Model, qwen2: Qwen2Model,
        qwen3: Qwen3Model, seed_oss: SeedOssModel, smollm3: SmolLM3Model, starcoder2: Starcoder2Model
    """,
    "CountedPositions": "opt: OPTDecoder",
    "BidirectionalModel": "eurobert: EuroBertModel, modernbert: ModernBertModel",
    "TextStack": """
        bart: BartDecoder BartEncoder, blenderbot: BlenderbotDecoder BlenderbotEncoder,
        blenderbot_small: BlenderbotSmallDecoder BlenderbotSmallEncoder, m2m_100: M2M100Decoder M2M100Encoder,
        marian: MarianDecoder MarianEncoder, mbart: MBartDecoder MBartEncoder, pegasus: PegasusDecoder PegasusEncoder,
        plbart: PLBartDecoder PLBartEncoder
    """,
    "StackOfDistances": "mt5: MT5Stack, t5: T5Stack",
    "PositionTable": """
        bart: BartLearnedPositionalEmbedding, blenderbot: BlenderbotLearnedPositionalEmbedding,
        blenderbot_small: BlenderbotSmallLearnedPositionalEmbedding, marian: MarianSinusoidalPositionalEmbedding,
        mbart: MBartLearnedPositionalEmbedding, pegasus: PegasusSinusoidalPositionalEmbedding,
        plbart: PLBartLearnedPositionalEmbedding
    """,
    "PositionTableOfIds": "m2m_100: M2M100SinusoidalPositionalEmbedding",
}
"""Classes that compute tokens alone with ``packed=True``, by the name of their fast class in ``stacks.py``. The models
in the same files that transformers lists by their heads run their output layers and losses on tokens."""


def _by_full_name(table: dict[str, str]) -> dict[str, str]:
    found = {}
    for fast, text in table.items():
        for row in text.split(","):
            place, names = row.split(":")
            folder, _, stem = place.strip().partition("/")
            found |= {f"transformers.models.{folder}.modeling_{stem or folder}.{name}": fast for name in names.split()}
    return found


WITHOUT_HEAD = {
    "BartDecoderWrapper", "BlenderbotDecoderWrapper", "BlenderbotSmallDecoderWrapper", "MBartDecoderWrapper",
    "MarianDecoderWrapper", "PLBartDecoderWrapper", "PegasusDecoderWrapper",
}  # fmt: skip
"""Models that only call a stack."""
NOT_SHIFTED = {
    "BartForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM", "MBartForCausalLM", "MarianForCausalLM",
    "PLBartForCausalLM", "PegasusForCausalLM",
}  # fmt: skip
"""Causal models whose loss compares the logits of a position with the label of the same position."""

CLASSES = {"transformers.pytorch_utils.Conv1D": "TransposedLinear", **_by_full_name(_CLASSES)}
"""Name of the fast class, by the full name of a class of transformers."""
STACKS = _by_full_name(_STACKS)
"""Name of the fast class with ``packed=True``, by the full name of a class of transformers."""


FILES = frozenset(path.rpartition(".")[0] for path in STACKS)
"""Files of the stacks."""


def name_of(kind: type) -> str | None:
    """Name of the fast class for a class of this name; None for a class that is not in the table."""
    return CLASSES.get(f"{kind.__module__}.{kind.__qualname__}")


def version() -> str:
    """Version of transformers, if it was imported; else ""."""
    return getattr(sys.modules.get("transformers"), "__version__", "")


def has_version() -> bool:
    """Return True if the table has the version of transformers that was imported."""
    first, second, *_ = (*version().split("."), "", "")
    return (first, second) in {(str(major), str(minor)) for major, minor in VERSIONS}
